"""Pages about a run and about a save: facts first, then templates. Imported only when used."""
