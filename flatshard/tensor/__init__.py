"""Flat parameters, sharded parameters that have their full shape, and operators for these.

A unit's parameters are concatenated into a flat parameter, of which each rank holds one range. A
sharded parameter is a tensor subclass with this rank's elements of one original parameter.
"""
