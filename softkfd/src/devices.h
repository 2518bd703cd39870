/* Which simulated device a file is: between the path family (paths.c) and the request family (kfd.c). */
#pragma once
#include "softkfd.h"

enum soft_device { SOFT_NONE, SOFT_KFD, SOFT_RENDER, SOFT_CARD };
enum soft_device soft_device_of_inode(dev_t dev, ino_t ino, struct soft_gpu **g); /* *g: for a render node or card */
void soft_opened_kfd(int fd); /* this process is the one that may use it */
