"""The command line, `crf`: one file per verb. Data goes to stdout, talk to stderr."""
