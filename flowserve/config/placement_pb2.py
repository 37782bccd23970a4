"""Made by tests/support/generated_code.py from placement.proto; do not edit."""

from google.protobuf.internal import builder

from flowserve.config.model_config_pb2 import POOL

DESCRIPTOR = POOL.AddSerializedFile(
(b'\n\x0fplacement.proto\x12\tplacement"#\n\x07Cluster\x12\x18\n\x07address\x18\x01 \x01(\tR\x07address"\xa1\x02'
 b'\n\x05Place\x12\x14\n\x05model\x18\x01 \x01(\tR\x05model\x12\x14\n\x05count\x18\x02 \x01(\rR\x05count\x12=\n\tr'
 b'esources\x18\x03 \x03(\x0b2\x1f.placement.Place.ResourcesEntryR\tresources\x124\n\x06labels\x18\x04 \x03(\x0b2\x1c'
 b'.placement.Place.LabelsEntryR\x06labels\x1a<\n\x0eResourcesEntry\x12\x10\n\x03key\x18\x01 \x01(\tR\x03key'
 b'\x12\x14\n\x05value\x18\x02 \x01(\x01R\x05value:\x028\x01\x1a9\n\x0bLabelsEntry\x12\x10\n\x03key\x18\x01 \x01'
 b'(\tR\x03key\x12\x14\n\x05value\x18\x02 \x01(\tR\x05value:\x028\x01"a\n\tPlacement\x12,\n\x07cluster\x18\x01 '
 b'\x01(\x0b2\x12.placement.ClusterR\x07cluster\x12&\n\x05place\x18\x02 \x03(\x0b2\x10.placement.PlaceR\x05place'
 b'b\x06proto3')
)
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
