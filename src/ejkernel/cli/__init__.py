"""The command line, `ejkernel`: nothing else imports it."""
