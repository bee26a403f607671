"""The console on a terminal: rich tables, line editing. Nothing else imports it."""
