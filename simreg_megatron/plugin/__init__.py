# SPDX-License-Identifier: Apache-2.0
"""The rooms that know Megatron: its flags, its seams, its log, and a CPU to run it on."""
