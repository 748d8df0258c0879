"""Checks and measurements that need an accelerator: make gpu-check"""
