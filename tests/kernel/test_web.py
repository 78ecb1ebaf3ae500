"""What a wrong web configuration does to the daemon."""

from __future__ import annotations

import subprocess
from pathlib import Path

from lockd_process import CHECKOUT, ROOT


def test_a_wrong_web_configuration_ends_it_with_2(tmp_path: Path) -> None:
    web = tmp_path / "web.yml"
    web.write_text("")
    command = [*CHECKOUT, "run", "--web.listen-address=127.0.0.1:0", f"--web.config.file={web}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
