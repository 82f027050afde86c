"""Names that users and other programs see: the API group, annotations, labels."""

from __future__ import annotations

import re

GROUP = "woolyai.dev"
VERSION = "v1alpha1"

#: Label of the pods that the operator handles.
RUNTIME_LABEL = "gpu-runtime"
RUNTIME = "woolyai"

#: Annotations of pods.
POD_VRAM = "woolyai.com/pod-vram"
PRIORITY = "woolyai.com/priority"
EXCLUSIVE = "woolyai.com/exclusive-gpu-use"
SWAP = "woolyai.com/swap-from-vram"
GPU_CLASS = "woolyai.com/gpu-class"
BESIDE_GPU = "woolyai.com/beside-gpu"
ANNOTATIONS = (POD_VRAM, PRIORITY, EXCLUSIVE, SWAP, GPU_CLASS, BESIDE_GPU)
PREFIX = "woolyai.com/"

#: Label that administrators set on a node.
OVERCOMMIT_LABEL = "woolyai.com/vram-overcommit-percent"

#: Labels that the operator sets on a node.
GPU = "woolyai.com/gpu"
GPU_COUNT = "woolyai.com/gpu-count"
GPU_VENDOR = "woolyai.com/gpu-vendor"
GPU_ARCH = "woolyai.com/gpu-arch"
GPU_MODEL = "woolyai.com/gpu-model"
VRAM_TOTAL = "woolyai.com/vram-total-mib"
VRAM_FIT = "woolyai.com/vram-fit-mib"
VRAM_FIT_PHYSICAL = "woolyai.com/vram-fit-physical-mib"
VRAM_FIT_IDLE = "woolyai.com/vram-fit-idle-mib"
IDLE_GPUS = "woolyai.com/idle-gpus"
#: Set on nodes that are in a group of the controller, with one label of `GROUP_PREFIX` for each group.
GROUPED = "woolyai.com/grouped"
GROUP_PREFIX = "woolyai.com/group."
ACCEPTS = "woolyai.com/accepts-clients"
CLASS_PREFIX = "woolyai.com/class."
INVENTORY = (
    GPU,
    GPU_COUNT,
    GPU_VENDOR,
    GPU_ARCH,
    GPU_MODEL,
    VRAM_TOTAL,
    VRAM_FIT,
    VRAM_FIT_PHYSICAL,
    VRAM_FIT_IDLE,
    IDLE_GPUS,
    ACCEPTS,
    GROUPED,
)


def is_inventory(label: str) -> bool:
    """Whether the operator writes and removes this label of nodes."""
    return label in INVENTORY or label.startswith((CLASS_PREFIX, GROUP_PREFIX))


def label_value(text: str) -> str:
    """Convert a text to a valid label value: letters, digits and `-_.`, at most 63, with a letter or digit at both ends."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.")
