"""Inputs that other people's runs had, each with neighbours: one module for a case of issue 36."""
