# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH of a run that is to be struck: Python imports it before anything else, in every process."""

from tests.faults import strike

strike.install()
