"""What an engine tells of the programs that it compiles with XLA."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from gradrule_server.link.v1 import link_pb2

_log = logging.getLogger(__name__)

_Outcome = link_pb2.JitNotice


@dataclass(slots=True)
class JitState:
    """Programs by their keys. compiling: those that XLA compiles now. chosen: those of which calls run with XLA."""

    compiling: set[str] = field(default_factory=set)
    chosen: set[str] = field(default_factory=set)

    def learn(self, notice: link_pb2.JitNotice) -> None:
        """Notes what the engine tells."""
        self.compiling.discard(notice.key)
        if notice.outcome == _Outcome.OUTCOME_COMPILING:
            self.compiling.add(notice.key)
        elif notice.outcome == _Outcome.OUTCOME_CHOSEN:
            self.chosen.add(notice.key)
            _log.info("calls of program %s run with XLA", notice.key)
        elif notice.outcome == _Outcome.OUTCOME_UNSPECIFIED:
            self.chosen.discard(notice.key)
        elif notice.outcome == _Outcome.OUTCOME_REFUSED:
            _log.info("program %s runs without XLA: %s", notice.key, notice.reason)
