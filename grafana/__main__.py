"""`python -m grafana` writes the dashboards to grafana/*.json."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.fleet import fleet_board
from grafana.host import host_board
from grafana.lock import lock_board
from grafana.service import service_board


def dashboards() -> dict[str, str]:
    """Return the texts of the dashboards' files, by the names of the files."""
    encoder = JSONEncoder(indent=2, ensure_ascii=False)
    boards = (fleet_board(), service_board(), host_board(), lock_board())
    return {f"{board.uid}.json": encoder.encode(board) + "\n" for board in boards}


if __name__ == "__main__":
    for name, text in dashboards().items():
        Path(__file__).with_name(name).write_text(text, encoding="utf-8")
