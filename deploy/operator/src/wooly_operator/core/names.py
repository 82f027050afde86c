"""Names that users and other programs see: the API group, annotations, labels."""

from __future__ import annotations

GROUP = "woolyai.dev"
VERSION = "v1alpha1"

#: Pods with this label are ours.
RUNTIME_LABEL = "gpu-runtime"
RUNTIME = "woolyai"

#: What a pod may ask for.
POD_VRAM = "woolyai.com/pod-vram"
PRIORITY = "woolyai.com/priority"
EXCLUSIVE = "woolyai.com/exclusive-gpu-use"
SWAP = "woolyai.com/swap-from-vram"
GPU_CLASS = "woolyai.com/gpu-class"
ANNOTATIONS = (POD_VRAM, PRIORITY, EXCLUSIVE, SWAP, GPU_CLASS)
PREFIX = "woolyai.com/"

#: What people put on a node.
OVERCOMMIT_LABEL = "woolyai.com/vram-overcommit-percent"

#: What the operator puts on a node.
GPU = "woolyai.com/gpu"
GPU_COUNT = "woolyai.com/gpu-count"
GPU_VENDOR = "woolyai.com/gpu-vendor"
GPU_ARCH = "woolyai.com/gpu-arch"
GPU_MODEL = "woolyai.com/gpu-model"
VRAM_TOTAL = "woolyai.com/vram-total-mib"
VRAM_FIT = "woolyai.com/vram-fit-mib"
IDLE_GPUS = "woolyai.com/idle-gpus"
ACCEPTS = "woolyai.com/accepts-clients"
CLASS_PREFIX = "woolyai.com/class."
INVENTORY = (GPU, GPU_COUNT, GPU_VENDOR, GPU_ARCH, GPU_MODEL, VRAM_TOTAL, VRAM_FIT, IDLE_GPUS, ACCEPTS)


def is_inventory(label: str) -> bool:
    """Whether a node's label is the operator's to write and to remove."""
    return label in INVENTORY or label.startswith(CLASS_PREFIX)
