"""Names that users and other programs see: the API group, annotations, labels."""

from __future__ import annotations

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
ANNOTATIONS = (POD_VRAM, PRIORITY, EXCLUSIVE, SWAP, GPU_CLASS)
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
IDLE_GPUS = "woolyai.com/idle-gpus"
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
    IDLE_GPUS,
    ACCEPTS,
)


def is_inventory(label: str) -> bool:
    """Whether the operator writes and removes this label of nodes."""
    return label in INVENTORY or label.startswith(CLASS_PREFIX)
