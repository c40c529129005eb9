"""A long run under churn: is memory flat, is no descriptor lost, is the load view the truth?"""
