"""Who vouches for a bundle: statements about digests, the signatures under them, and the policy that says whose count.

Without `cryptography` everything here can be imported, and everything but checking a signature can be used.
"""
