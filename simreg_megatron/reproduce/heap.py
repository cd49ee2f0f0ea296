# SPDX-License-Identifier: Apache-2.0
"""Let a process that trains on a CPU keep its large tensors' memory, for the environment that it is started with.

glibc maps each large block anew and gives it back when it is freed, so that every step clears all its memory again,
page by page, about a tenth of a step of the tiny models. The numbers of a run are the same. Both limits go together:
one without the other turns off what glibc adapts by itself, and is slower than none. Other C libraries ignore them.
"""

_BYTES = str(4 << 30)
KEPT = {"MALLOC_MMAP_THRESHOLD_": _BYTES, "MALLOC_TRIM_THRESHOLD_": _BYTES}
