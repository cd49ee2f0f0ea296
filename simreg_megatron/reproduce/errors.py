# SPDX-License-Identifier: Apache-2.0
"""The one error of this room."""


class ReproduceError(ValueError):
    """An experiment cannot run, or go on, as asked; the message is the one sentence the user reads."""
