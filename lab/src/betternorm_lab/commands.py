"""The commands that the lab adds to ``betternorm``; an entry point in pyproject.toml names this table."""

from betternorm.cli.main import Command

EXTRA = "lab"
COMMANDS = {
    "demo": Command("betternorm_lab.cli.demo", "train small models with each technique, and compare", EXTRA),
    "train": Command(
        "betternorm_lab.cli.train", "train a model with any norm layer, and tune alpha", EXTRA, resumes=True
    ),
    "reproduce": Command(
        "betternorm_lab.cli.reproduce", "run the paper's experiments, at four scales", EXTRA, resumes=True
    ),
    "report": Command("betternorm_lab.cli.report", "show the runs of a folder as a page and as files", EXTRA),
}
