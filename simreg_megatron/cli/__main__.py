# SPDX-License-Identifier: Apache-2.0
"""`python -m simreg_megatron.cli`, where the command `simreg-megatron` is not on PATH."""

import sys

from simreg_megatron.cli import main

sys.exit(main())
