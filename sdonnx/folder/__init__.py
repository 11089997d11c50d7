"""Pipeline folders on disk: layout, lock, version and certificate."""
