# SPDX-License-Identifier: Apache-2.0
"""Objectives other than SimReg, one in each file: its loss in plain torch, its terms over ranks, and its record.

They join in as those of a user's own package do (docs/objectives.md); nothing in the rest of the package imports them.
"""
