# SPDX-License-Identifier: Apache-2.0
"""Figures and tables from what runs leave behind: TensorBoard events and hidden states."""

from simreg_megatron.report.curves import draw_curves
from simreg_megatron.report.heatmap import HiddenStates, draw_heatmaps, excerpt, mean_cosines, read_hidden_states
from simreg_megatron.report.runs import ReportError, Run, Series, read_run
from simreg_megatron.report.steps import Overhead, overhead
from simreg_megatron.report.table import Summary, compare_validation, describe_steps, summarize, summary_table

__all__ = [
    "HiddenStates",
    "Overhead",
    "ReportError",
    "Run",
    "Series",
    "Summary",
    "compare_validation",
    "describe_steps",
    "draw_curves",
    "draw_heatmaps",
    "excerpt",
    "mean_cosines",
    "overhead",
    "read_hidden_states",
    "read_run",
    "summarize",
    "summary_table",
]
