"""Networks with the joints that channels go through. Shapes: B rows."""

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions, added to what came in: that of ResNet-18."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet18(nn.Module):
    """He et al. 2015, https://arxiv.org/abs/1512.03385, table 1, in the names of torchvision."""

    def __init__(self, widths=(64, 128, 256, 512), num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        before = widths[0]
        for number, width in enumerate(widths, start=1):
            blocks = nn.Sequential(Block(before, width, 1 if number == 1 else 2), Block(width, width, 1))
            setattr(self, f"layer{number}", blocks)
            before = width
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Dense(nn.Module):
    """Each convolution reads all before it."""

    def __init__(self):
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, padding=1)
        self.two = nn.Conv2d(9, 5, 3, padding=1)
        self.three = nn.Conv2d(14, 7, 1)
        self.out = nn.Linear(7 * 4, 2)

    def forward(self, x):
        for layer in (self.one, self.two):
            x = torch.cat([x, layer(x).tanh()], dim=1)
        return self.out(torch.nn.functional.adaptive_avg_pool2d(self.three(x), 2).flatten(1))


def mobile():
    """Group norms, depthwise, grouped and transposed convolutions, PReLU, pixel shuffle, GLU, and a flat head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8), nn.Hardswish(inplace=True), nn.Conv2d(8, 16, 3, groups=8),
        nn.PReLU(16), nn.Conv2d(16, 12, 1, groups=2), nn.Conv2d(12, 16, 1), nn.PixelShuffle(2),
        nn.ConvTranspose2d(4, 6, 2), nn.BatchNorm2d(6), nn.Upsample(scale_factor=2), nn.ZeroPad2d(1),
        nn.Conv2d(6, 10, 1), nn.GLU(1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(20, 5), nn.ELU(),
        nn.Linear(5, 2),
    )  # fmt: skip


class Squeeze(nn.Module):
    """Channels weighted by a sigmoid of their means, and by a parameter and a buffer of their own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.scale = nn.Parameter(torch.randn(6, 1, 1))
        self.register_buffer("shift", torch.randn(1, 6, 1, 1))
        self.down, self.up = nn.Conv2d(6, 4, 1), nn.Conv2d(4, 6, 1)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x):
        x = self.conv(x) * self.scale + self.shift
        weight = self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return self.out(x * weight).mean((2, 3))


class Reads(nn.Module):
    """The last step of a recurrent network, read by a linear layer."""

    def __init__(self, recurrent, width):
        super().__init__()
        self.recurrent = recurrent
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        return self.out(self.recurrent(x)[0][:, -1])


class Pools(Reads):
    """What a recurrent network makes of rows of unequal length."""

    def forward(self, x):
        return self.out(self.recurrent(x, torch.tensor([5, 2])).pooled)


class Attention(nn.Module):
    """As written by hand: projections of queries, keys and values for heads that are told apart by reshape."""

    def __init__(self, dim=12, num_heads=3, packed=False, num_shared=None, repeats=False):
        super().__init__()
        self.shares = num_shared is not None
        self.repeats = num_heads // num_shared if repeats else 1
        self.num_heads = num_heads
        self.packed = packed
        self.qkv = nn.Linear(dim, 3 * dim) if packed else None
        self.query, self.key, self.value = (None,) * 3 if packed else (nn.Linear(dim, dim) for _ in range(3))
        self.head_dim = dim // num_heads
        if num_shared is not None:  # heads of keys and values, each for several of the query
            self.key, self.value = (nn.Linear(dim, num_shared * self.head_dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        rows, steps, _ = x.shape
        if self.packed:
            parts = self.qkv(x).reshape(rows, steps, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind()
        else:
            layers = self.query, self.key, self.value
            heads = -1 if self.shares else self.num_heads
            width = self.head_dim if self.shares else -1
            parts = [one(x).view(rows, steps, heads, width).transpose(1, 2) for one in layers]
        if self.repeats > 1:  # as transformers, where a kernel shares no heads
            parts[1:] = [one[:, :, None].expand(-1, -1, self.repeats, -1, -1).flatten(1, 2) for one in parts[1:]]
        mixed = nn.functional.scaled_dot_product_attention(*parts, enable_gqa=self.shares and self.repeats == 1)
        return self.out(mixed.transpose(1, 2).reshape(rows, steps, -1))


class Graphs(nn.Module):
    """Called as networks of PyTorch Geometric are, with nodes, edges, and the graph of each node; two graphs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, edge_index, batch):
        found = self.layer(x)
        found = found.index_add(0, edge_index[1], found[edge_index[0]])
        return found.new_zeros(2, 2).index_add(0, batch, found)


def two_graphs():
    """Return nodes (7, 3), edges and the graph of each node, as ``Graphs`` takes them."""
    edges = torch.tensor([[0, 1, 2, 4, 6], [1, 2, 3, 5, 4]])
    return torch.randn(7, 3), edges, torch.tensor([0, 0, 0, 0, 1, 1, 1])
