"""Conversions that the tables of several trainers share."""
