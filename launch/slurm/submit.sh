#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Submit a run to SLURM as a chain of jobs:
#   bash launch/slurm/submit.sh --cluster my.env launch/pretrain_llama.sh --model 7b --data PREFIX --tokenizer PATH ...
# A login node's own Python 3.10 or newer is enough if my.env sets PYTHON or CONTAINER_IMAGE; the run's own checks more.
''':' <<'bash' # Python reads the lines from here to "bash", bash all others
'''
import sys; sys.exit(print("error: this is a bash script, not Python: run bash launch/slurm/submit.sh ...", file=sys.stderr) or 2)
r'''
bash
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@" # started by another shell, such as sh
set -euo pipefail
root=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
for python in "${VIRTUAL_ENV:-$root/.venv}/bin/python" "$root/.venv/bin/python" python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/launch/slurm/submit.py" "$@"
  fi
done
echo "error: no Python 3.10 or newer was found: activate an environment that has one" >&2
exit 2
# '''
