# SPDX-License-Identifier: Apache-2.0
"""uv is told what pip was told, or pip does the work."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import jobs
from tools.uv_settings import CannotFollow, settings


def test_a_mirror_constraints_and_wheels_of_ones_own() -> None:
    found = settings(
        """
        global.index-url='https://mirror.example/simple'
        global.extra-index-url='file:///a/simple\\nfile:///b/simple'
        global.find-links='/one /two'
        global.constraint='/etc/constraints.txt'
        global.cert='/etc/certs.pem'
        :env:.default-timeout='180'
        """.splitlines()
    )
    assert found == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_CONSTRAINT": "/etc/constraints.txt",
        "SSL_CERT_FILE": "/etc/certs.pem",
        "UV_HTTP_TIMEOUT": "180",
    }


def test_the_environment_wins_and_sections_of_other_commands_do_not_count() -> None:
    lines = [":env:.index-url='https://env'", "global.index-url='https://file'", "download.platform='x'"]
    assert settings(lines) == settings(reversed(lines)) == {"UV_DEFAULT_INDEX": "https://env"}


@pytest.mark.parametrize("line", ["global.only-binary=':all:'", "install.pre='true'", "global.target='/x'"])
def test_what_uv_cannot_follow_is_left_to_pip(line: str) -> None:
    with pytest.raises(CannotFollow):
        settings([line])
    done = jobs.run([sys.executable, "-m", "tools.uv_settings"], input=line)
    assert done.returncode == 1 and not done.stdout and len(done.stderr.splitlines()) == 1
