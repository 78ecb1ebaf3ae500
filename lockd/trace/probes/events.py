"""Events that the programs of a tool write to a ring buffer, one record each."""

from __future__ import annotations

import numpy as np

from lockd.columns.structs import Columns, struct_dtype
from lockd.kernel.rings import Ring, RingReader
from lockd.trace.core.session import Session


class EventReader:
    """Reads records from the ring buffer `ring`. They have the layout of the values of the map `record`."""

    def __init__(self, session: Session, ring: str, record: str) -> None:
        infos = {info.name: info for info in session.manifest.maps}
        self._ring = RingReader(Ring(session.fds[ring], infos[ring].entries))
        self._dtype = struct_dtype(infos[record].value)

    def read(self) -> Columns:
        """The records since the last call, in the order in which they were written."""
        # bytes() copies each record before the next one is read. join() alone would first make a list of all
        # records, and programs may overwrite a record as soon as the next one is read.
        return np.frombuffer(b"".join(map(bytes, self._ring.records())), self._dtype)
