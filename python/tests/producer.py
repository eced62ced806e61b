"""A producer of DLPack capsules that counts how often its memory is freed."""

import ctypes

import numpy


class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("index", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("axes", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Legacy(ctypes.Structure):
    name = b"dltensor"
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    name = b"dltensor_versioned"
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
is_valid = ctypes.pythonapi.PyCapsule_IsValid
is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


KEPT = []


class Producer:
    """A tensor whose capsules are made by hand."""

    def __init__(
        self, array, kind=Versioned, *, code=2, bits=None, device=(1, 0), said=None, flags=0, major=1,
        strided=True, accepts_version=True, one_capsule=False,
    ):
        self.array = array
        self.kind = kind
        self.code, self.bits = code, bits or 8 * array.itemsize
        self.device, self.flags, self.major = device, flags, major
        #: The device that is named before a capsule is made, where it differs from the capsule's.
        self.said = said or device
        self.strided, self.accepts_version, self.one_capsule = strided, accepts_version, one_capsule
        self.made = 0
        #: What deleters were called with.
        self.freed = []
        self.capsule = None

    def __dlpack_device__(self):
        return self.said

    def __dlpack__(self, **options):
        if options and not self.accepts_version:
            raise TypeError("unexpected keyword argument 'max_version'")
        if self.one_capsule and self.capsule is not None:
            return self.capsule
        axes, size = self.array.ndim, self.array.itemsize
        shape = (ctypes.c_int64 * axes)(*self.array.shape)
        strides = (ctypes.c_int64 * axes)(*(stride // size for stride in self.array.strides))
        managed = self.kind()
        managed.tensor = Tensor(
            self.array.ctypes.data, Device(*self.device), axes, DataType(self.code, self.bits, 1),
            shape, strides if self.strided else None, 0,
        )
        address = ctypes.addressof(managed)
        deleter = DELETER(self.freed.append)
        managed.deleter = deleter
        if self.kind is Versioned:
            managed.major, managed.flags = self.major, self.flags
        self.made += 1
        name = self.kind.name

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def destructor(capsule):
            if is_valid(capsule, name):
                managed.deleter(address)

        # Kept for good: a second call of a deleter has to be seen, not to crash.
        KEPT.append((managed, shape, strides, deleter, destructor))
        self.capsule = new_capsule(address, self.kind.name, ctypes.cast(destructor, ctypes.c_void_p))
        return self.capsule

    def assert_freed_once(self):
        self.capsule = None
        assert len(self.freed) == self.made
        assert len(set(self.freed)) == self.made


def zeros(*shape, **options):
    return Producer(numpy.zeros(shape, dtype="float32"), **options)
