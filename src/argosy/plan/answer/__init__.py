"""The planner's answer: from what a user typed to tables, reasons and a page."""
