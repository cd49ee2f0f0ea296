# SPDX-License-Identifier: Apache-2.0
"""Code shared by the launch scripts; `launch/pretrain_*.sh` are the commands."""
