"""Where `report` and `why` find a report, and how it is shown."""
