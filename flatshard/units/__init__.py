"""Planning: which unit owns each parameter, and where the parameter lies in a flat parameter.

This package reads only names, shapes and modules. It changes no tensor and does not communicate.
"""
