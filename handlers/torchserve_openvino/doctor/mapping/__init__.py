"""Drafts of operator mappings, written from traced formulas."""
