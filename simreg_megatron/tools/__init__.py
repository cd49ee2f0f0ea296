# SPDX-License-Identifier: Apache-2.0
"""Programs around a run that the plugin does not import."""
