"""The command line: one thin file per verb, imported when the verb is used."""
