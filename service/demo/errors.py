"""What ends the demo before its end.

DemoError        one line for the person who started it
└── StalledError the service died, hangs or does not do what was waited for; the audit is made all the same
"""


class DemoError(Exception):
    """The demo cannot go on; the text is one line that says what to do."""


class StalledError(DemoError):
    """The service does not get on."""
