"""Planning: to which unit each parameter belongs, and its position in a flat parameter.

This package reads only names, shapes and modules. It changes no tensor and does not communicate.
"""
