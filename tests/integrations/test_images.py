"""Files of images: one folder per class, and .npz."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from betternorm.errors import UserError
from betternorm.integrations.images import class_names, images_by_class, labelled_arrays, open_image, open_npz

Image = pytest.importorskip("PIL.Image")


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("dog/b.PNG", "dog/more/a.jpg", "cat/c.gif", "cat/notes.txt", ".hidden/d.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert class_names(tmp_path) == ["cat", "dog"]
    paths, labels = images_by_class(tmp_path, ["cat", "cow", "dog"])
    assert [path.name for path in paths] == ["c.gif", "b.PNG", "a.jpg"]
    assert labels == [0, 2, 2]


def test_an_image_outlives_its_file(tmp_path: Path) -> None:
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    picture = open_image(tmp_path / "a.png")
    (tmp_path / "a.png").unlink()
    np.testing.assert_array_equal(np.asarray(picture), pixels)


def test_what_is_no_image_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"junk")
    with pytest.raises(UserError, match=r"a\.png cannot be read as an image"):
        open_image(tmp_path / "a.png")


def test_a_split_of_an_npz_is_read_by_its_name(tmp_path: Path) -> None:
    images, labels = np.zeros((3, 4, 4), np.uint8), np.array([2, 0, 1])
    np.savez(tmp_path / "a.npz", test_images=images, test_labels=labels, train_images=images, classes=["a", "b", "c"])
    with open_npz(tmp_path / "a.npz") as file:
        assert "classes" in file
        found, found_labels = labelled_arrays(tmp_path / "a.npz", file, "test_")
        with pytest.raises(UserError, match="train_images and no train_labels"):
            labelled_arrays(tmp_path / "a.npz", file, "train_")
    np.testing.assert_array_equal(found, images)
    np.testing.assert_array_equal(found_labels, labels)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no such file"), (b"junk", "cannot be read as .npz"), (b"", "cannot be")]
)
def test_what_is_no_npz_is_told(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(UserError, match=message), open_npz(tmp_path / "a.npz"):
        pass
