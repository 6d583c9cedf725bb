"""A store on the disk, which several processes see, at ``store:///folder``; importing it registers the protocol."""

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Store(LocalFileSystem):
    protocol = "store"

    @classmethod
    def _strip_protocol(cls, path):
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(str(path).removeprefix("store://"))

    def rm(self, path, recursive=False, maxdepth=None):
        for file in self.find(path) if self.isdir(path) else []:  # one by one, as in a store
            self.rm_file(file)
        super().rm(path, recursive, maxdepth)

    def unstrip_protocol(self, name):
        return f"store://{self._strip_protocol(name)}"


fsspec.register_implementation("store", Store, clobber=True)
