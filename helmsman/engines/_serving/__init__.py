"""What rollout engines share: admission of requests, what they have generated, and their way across
weight updates.
"""
