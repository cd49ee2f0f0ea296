# SPDX-License-Identifier: Apache-2.0
"""All that a machine with a GPU can tell, by one command, in one report: `make gpu`."""
