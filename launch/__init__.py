# SPDX-License-Identifier: Apache-2.0
"""What the launch scripts share; `launch/pretrain_*.sh` are the commands."""
