"""What needs an accelerator, checked and measured on one: make gpu-check"""
