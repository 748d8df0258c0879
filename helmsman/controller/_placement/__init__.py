"""Placement as a pure function: cluster snapshot and jobs in, plan or reason out."""
