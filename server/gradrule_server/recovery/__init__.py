"""Recovers calls whose engine process ends before it answers.

An engine runs graphs that strangers wrote, so it may end at any time. Evaluation has no side effects, so a call that
lost its engine can be run again in another one. This package decides which calls run again, which of them run alone to
find out whether they crash engines, and which graphs are refused for a while (quarantine).

- `endings`: why an engine ended, and the error that its calls get.
- `crash_history`: what each graph has done to engines so far, and which graphs are in quarantine.
- `call_recovery`: runs one call until it completes: beside others, or alone.

This package knows nothing of sockets and processes; `gradrule_server.link` imports it.
"""
