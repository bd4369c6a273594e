"""The models of the experiments (section 4.1), with any norm layer.

The paper's ResNet-18 for small images is in ``resnet``, the published networks for CIFAR-100 in ``cifar_resnets``; the
others come from timm or torchvision.
"""

from betternorm_lab.models.building import ALIASES, NETWORKS, NORMS, apply_norm, build
from betternorm_lab.models.cifar_resnets import CIFAR_RESNETS, CifarResNet
from betternorm_lab.models.resnet import PostActivationResNet, PreActivationBlock, ResNet

__all__ = [
    "ALIASES",
    "CIFAR_RESNETS",
    "NETWORKS",
    "NORMS",
    "CifarResNet",
    "PostActivationResNet",
    "PreActivationBlock",
    "ResNet",
    "apply_norm",
    "build",
]
