"""Limits on the input of WIS readers. A reader's memory and time grow with each of these counts, so each count has a limit.

The clients' recorder stays below the limits: a program has up to 512 instructions by default, at most 4,096, or at most 32,768
for a graph of `torch.compile`. The program also frees the buffers that died since the previous program.
"""

from __future__ import annotations

from typing import Final

#: Maximum size, in bytes, of one encoded program. A graph of 32,768 instructions and 16,384 forms needs about 3 MiB.
MAX_PROGRAM_BYTES: Final = 4 << 20
#: Maximum number of instructions in a program. To check and prepare one instruction takes 50 to 100 us; to keep it, about 2 KiB.
MAX_INSTRUCTIONS: Final = 65_536
#: Maximum number of forms (different instructions) in a program.
MAX_FORMS: Final = 16_384
#: Maximum number of slot references in a program: the sum over its instructions. A fused optimizer step has six per parameter.
MAX_REFERENCES: Final = 262_144
#: Maximum number of params of one run.
MAX_PARAMS: Final = 131_072
#: Maximum number of buffers to free after one run. To free 65,536 takes about 30 ms; a client frees the rest with its next runs.
MAX_FREES: Final = 65_536
#: Maximum number of nodes (operands and attribute values): in one form, and in all forms of a program together. An operator on
#: 8,192 tensors has 16,384 nodes.
MAX_FORM_NODES: Final = 32_768
MAX_NODES: Final = 262_144

#: Maximum time of one `sleep`, in ns. A longer time is several instructions, between which other sessions may run.
MAX_SLEEP_NS: Final = 10_000_000
#: Maximum size of a module in bytes, without its constants; maximum number of its steps, and of its programs.
MAX_MODULE_BYTES: Final = 16 << 20
MAX_MODULE_STEPS: Final = 131_072
MAX_MODULE_PROGRAMS: Final = 4_096
#: Maximum number of instructions, and of nodes (operands and attribute values), in all programs of a module together.
MAX_MODULE_INSTRUCTIONS: Final = 262_144
MAX_MODULE_NODES: Final = 1 << 20
#: Maximum number of buffer references in a module: the sum over its steps.
MAX_MODULE_REFERENCES: Final = 2 << 20
