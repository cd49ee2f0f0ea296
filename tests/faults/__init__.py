# SPDX-License-Identifier: Apache-2.0
"""Faults injected into tiny pretraining runs: what is lost, what is said, and whether the run ends with the same bits.

`layouts` says which runs there are, `faults` which faults, `strike` is what happens inside a rank, `starts` begins a
run, `disks` has disks that fill up, `life` takes one run through its faults, `judge` says whether that was right,
`campaign` does that many times, and `table` is what the page shows.
"""
