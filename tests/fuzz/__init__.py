# SPDX-License-Identifier: Apache-2.0
"""Every reader of bytes from elsewhere, held to one bar under inputs that nobody wrote (docs/reliability.md).

    python -m tests.fuzz --seconds 600      all readers in turn, guided by coverage where atheris is installed

A reader joins by an entry in `tests.fuzz.readers`, and by a valid small input of it in `tests.fuzz.seeds`.
"""
