#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tokenize text for Megatron: bash launch/prepare_data.sh FOLDER_OR_FILES --tokenizer PATH --out DIR [--help]
# The same as `simreg-megatron data prepare`, with the Python of .venv.
''':' <<'bash' # Python reads the lines from here to "bash", bash all others
'''
import sys; sys.exit(print("error: this is a bash script, not Python: run bash launch/prepare_data.sh ...", file=sys.stderr) or 2)
r'''
bash
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started by another shell, such as sh
set -euo pipefail

root=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/start.bash
source "$root/launch/start.bash"
find_python "$root" datasets sentencepiece
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" "$root/simreg_megatron/cli/__main__.py" data prepare "$@"
# '''
