# SPDX-License-Identifier: Apache-2.0
"""Which tokens a rank holds, and the exchanges between ranks that share a sequence."""
