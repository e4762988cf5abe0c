"""Methods that are broken in one place each: the negative controls of the common checks, in modules of the same names."""

from sparing.methods.exact import Exact


# Exact attention by its plain formula; subclasses break it in one place.
class Broken(Exact):
    name = "_broken"
    __doc__ = Exact.__doc__

    def fast(self, q, k, v, call):
        return self.reference(q, k, v, call)
