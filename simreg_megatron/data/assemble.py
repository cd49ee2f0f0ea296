# SPDX-License-Identifier: Apache-2.0
MANIFEST = "manifest.json"
